"""What is behind `attnops.kernels.triton.attention`: `plan` (plain Python), `call` (the launches) and `device` (what runs there)."""
