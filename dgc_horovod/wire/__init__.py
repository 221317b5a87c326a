"""The wire format: buckets and their segments, packets, codecs."""
