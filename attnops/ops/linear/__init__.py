"""Linear layers with what is fused into them."""
