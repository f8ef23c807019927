"""From JSONL files to optimizer steps: reading, tokenising, packing, loading."""
