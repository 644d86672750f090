"""For existing Flower apps: `fp8_mod` on the client, `FP8(strategy)` on the server, two lines in all."""
