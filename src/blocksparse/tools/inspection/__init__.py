"""`blocksparse inspect`: where a model's heads look, and what presets keep of it, as one HTML file."""
