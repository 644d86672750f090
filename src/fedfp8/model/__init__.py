"""What a model consists of (`layout`), its values (`state`), and the lossy step: what is sent instead of them."""
