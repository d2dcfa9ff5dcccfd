"""The passes that write the chosen kernel into a compiled graph, one pass a file."""

if __name__ != "attnops.lowering":
    raise ImportError("import attnops.lowering, not lowering (the folder is a part of attnops)")
