"""What the stage scripts share and what teaches nothing the second time."""
