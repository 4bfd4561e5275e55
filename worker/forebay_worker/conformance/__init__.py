"""What every engine must do, as tests to run against any, by `pytest --engine mypkg:MyEngine`.

    pytest --pyargs forebay_worker.conformance --engine mypkg:MyEngine --engine-setting seed=1

An engine is made from WorkerSettings once per run and driven through the Engine protocol alone.
What its card does not declare is skipped, never assumed. docs/adding-an-engine.md has the rules.
"""
