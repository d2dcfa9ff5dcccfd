"""Stand-ins: ops with the schema, checks and shape rules of a kernel package, and a reference body.
They are not the kernels."""
