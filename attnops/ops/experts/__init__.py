"""Experts of a mixture, and the router that picks them."""
