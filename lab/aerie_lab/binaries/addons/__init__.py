"""Modules that the lab puts among the packages of an environment of its own (families.Addon): each stands alone."""
