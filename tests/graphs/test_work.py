"""The vector work of averaged steps that is called, and its default."""

from __future__ import annotations

import torch

import sanc
from sanc.autograd.vector_work import CALLED
from sanc.graphs.work import RecordedWork


def test_only_one_process_records_work_and_only_on_request_or_by_default():
    p = torch.nn.Parameter(torch.ones(3, 2))
    kinds = [type(sanc.SANC([p], seed=0, capture=capture)._driver.vector_work) for capture in (None, True, False)]
    assert kinds == [RecordedWork, RecordedWork, type(CALLED)]


def test_work_is_called_where_there_are_no_graphs():
    p = torch.nn.Parameter(torch.ones(3, 2))
    opt = sanc.SANC([p], seed=0)
    for _ in range(4):
        p.grad = p.detach().clone()
        opt.step()
    assert opt.capture_reason == "the parameters are on cpu, and only cuda has graphs"
