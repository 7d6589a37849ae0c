"""Set-up of these tests: new buffers hold garbage."""

from tests.poisoned import poisoned_buffers as poisoned_buffers
