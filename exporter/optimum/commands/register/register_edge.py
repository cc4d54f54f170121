"""Optimum's command line loads every module of this namespace and registers what REGISTER_COMMANDS lists."""

from __future__ import annotations

from optimum.commands.export.base import ExportCommand

from edge_export.cli.optimum import EdgeExportCommand

REGISTER_COMMANDS = [(EdgeExportCommand, ExportCommand)]
