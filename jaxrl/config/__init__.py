"""Every key of a run: the schema, the files and command lines that set it, and its page."""

from jaxrl.config.schema import Config as Config
