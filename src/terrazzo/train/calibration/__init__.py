"""A few real steps of a configuration, measured here: what promises stand on afterwards.

trial      the steps, in ranks of their own
calibrate  the record that is made of them, and where it is kept
"""
