"""Which modules can be switched, and trials that prove it."""
