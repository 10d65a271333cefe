"""What is stated before anything is allocated: parameters in flat spaces, where their states rest, and what that moves.

Read layout and rectangles, elements; place and precision, the plan's words; weight_wire, what weights are sent as;
bucket_spec, what follows from all of these for a bucket; box, the part of a parameter that a rank holds along `tp` or
`ep`; partition, which parameters are a unit; sharding_spec, what all buckets follow; stages and absent, what this rank
runs of a model in stages, and what it lacks.
"""
