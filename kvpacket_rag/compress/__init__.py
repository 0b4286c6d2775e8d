"""Makes packets smaller: presses leave tokens out when a chunk is encoded, quantisers store the rest in few bits."""
