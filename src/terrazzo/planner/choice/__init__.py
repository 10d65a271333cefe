"""Which setups to try, which is best, how many devices are needed, and the configuration that runs it."""
