"""Programs on disk: what one process compiled, the next one takes in the place of capturing it.

`describe` says objects as text, `questions` says what a program asks and asks it again, `text` reads and checks the
text of computations, `entry` is a whole program as a document, `files` writes and reads documents, `keep` decides which
one a call gets.
"""
