"""`blocksparse demo`: a real model reads a real text with each preset; a table, a JSON file and a picture."""
