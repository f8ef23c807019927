"""The language model: its shape, its layers, generation, weight files, devices and metrics."""
