"""Launches of Triton's kernels, which several backends make. Importing its modules but `beside`
imports triton."""
