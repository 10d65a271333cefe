"""Tools of the project. Each is run from the root of a clone as `python -m tools.NAME`.

    lint                             what ruff and mypy do not check: imports, finalizers, sizes (`make lint`)
    mutations                        faults put in on purpose, which the tests must find (`make mutations`)
    reference_pages                  tables of the reference: names, keys, options
    planner_page                     what the planner's pages repeat: formulas, accuracy, fields, output of commands
    migration_pages, with migration  the migration guides: diffs, dtypes, every key's fate
    third_party                      scripts of other libraries, as they are and on Terrazzo (`make third-party`)

`site` is what mkdocs is told about the pages (`make docs`).
"""
