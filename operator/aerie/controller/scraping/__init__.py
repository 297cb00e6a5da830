"""Scrapes of engine metrics, from pods or from Prometheus servers.

scraper            follows resources, and answers reconciles
pod_scraper        scrapes pods; http_fetch and http_client limit what a response may cost
prometheus_poller  polls Prometheus servers; prometheus is the client
scrape_pool        pods and servers that are scraped, and when each is due
targets            the pods to scrape
engine_metrics     metrics, blocks and calibrations from the samples; sliding_window is the window of one pod
"""
