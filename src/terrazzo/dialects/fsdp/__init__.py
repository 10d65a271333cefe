"""torch's own sharding: FSDP1 and FSDP2 as dialects, and the words that other dialects take from them."""
