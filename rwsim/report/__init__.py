"""`rwsim report`: any result of rwsim as one self-contained page.

`find` says which file of a directory is a result and of which kind; each kind is a room that makes a `sheet.Sheet` of it;
`rwsim.page` makes the document.
"""
