"""CUDA-graph tooling lands here: splitting at calls that may not be captured, shape buckets, capture and replay."""

if __name__ != "attnops.graphs":
    raise ImportError("import attnops.graphs, not graphs (the folder is a part of attnops)")
