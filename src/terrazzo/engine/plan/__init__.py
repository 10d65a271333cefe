"""What is stated before anything is allocated: parameters in flat spaces, where their states rest, and what that moves.

Read layout and rectangles, elements; place, family and precision, the plan's words; spec, what follows from them for a
bucket; partition, which parameters are a unit; axes and sharding, the mesh and what all buckets follow; elsewhere, what
other ranks have of a model in stages; marks, what is left on modules and meshes for later folders.
"""
