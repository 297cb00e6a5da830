"""Scraping of the engines' metrics over HTTP, from pods or from Prometheus."""
