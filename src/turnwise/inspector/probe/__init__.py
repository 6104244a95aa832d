"""Probe: is an environment's reward paid for behaviour that its oracle, its success flag or a check calls wrong?"""
