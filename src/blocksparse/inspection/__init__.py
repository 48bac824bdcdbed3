"""`blocksparse inspect`: where a model's heads look, what presets keep of it, and what that costs, as one HTML file."""
