"""The reference implementations: plain torch, float32 accumulation (float64 for float64 inputs), one per op."""
