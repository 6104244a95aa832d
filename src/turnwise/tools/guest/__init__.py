"""The code that runs *inside* the isolation. Standard library only: the host sends these sources to a bare interpreter.

Nothing here knows the host, its paths or its secrets; its configuration arrives in one small message.
"""
