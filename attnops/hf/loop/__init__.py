"""The decode loop of a plain `generate()`: logits to token in one captured graph, and a host that reads one step behind."""
