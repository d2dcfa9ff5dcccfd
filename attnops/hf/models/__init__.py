"""Which modules of a model can be switched, trials that prove it, and the modules that take their
place."""
