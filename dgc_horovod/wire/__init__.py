"""The bytes that travel: what is in a bucket, packets, codecs."""
