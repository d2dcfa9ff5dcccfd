"""What an op is, and how its kernel is chosen: records, arguments, checks, problems, kernels and
the choice among them."""
