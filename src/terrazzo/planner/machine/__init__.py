"""What is known of machines: devices, their links, and what was measured on them."""
