"""What is behind `attnops.kernels.triton`: `plan` (plain Python), `call` (the launches) and `device` (what runs there)."""
