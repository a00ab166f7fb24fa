"""What is fuzzed: each module has `check`, which the name of a corpus's folder finds.

`check(data)` gives a part of the product bytes from outside. It returns whether they were accepted. It raises if the
part failed in another way than by the error that it promises, or if what it accepted breaks a promise.
"""
