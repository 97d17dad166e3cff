"""The peer transport: one launch moves rows over NVLink and sums them."""
