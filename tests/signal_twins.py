"""The signal typed out from its definitions: per-sample gradients, explicit Jacobians, least squares, real insertion.

These twins know neither hooks nor formulas: one backward pass a sample, one forward pass a column of the
Jacobian, the gradient of a projection from a network that has the block.
"""

import copy

import numpy as np
import torch
from torch import nn
from torch_helpers import generator

from growth_service.blocks import flatten_projection, set_projection
from growth_service.growth import insert_block, widen

F64 = torch.float64


def per_sample(outputs, targets):
    """Cross-entropies of samples; tokens of one sequence are added up."""
    classes_last = outputs.reshape(-1, outputs.shape[-1])
    return nn.functional.cross_entropy(classes_last, targets.reshape(-1), reduction="none").reshape(
        len(targets), -1
    ).sum(dim=1)  # fmt: skip


LOSSES = {
    "none": per_sample,
    "sum": lambda outputs, targets: per_sample(outputs, targets).sum(),
    "mean": lambda outputs, targets: per_sample(outputs, targets).mean(),
}


def stream(net, inputs):
    with torch.no_grad():
        return net.stem(inputs)


def gradient_rows(net, inputs, targets, *, loss=per_sample):
    """dl/dz of each sample by a backward pass of its own. ``[N, entries of one stream]``."""
    rows = []
    for i in range(len(targets)):
        z = stream(net, inputs[i : i + 1]).requires_grad_()
        loss(net.top(z), targets[i : i + 1]).sum().backward()
        rows.append(z.grad.flatten().numpy())
    return np.array(rows)


def tangents(block, z):
    """The explicit Jacobian: column k is what the k-th entry of [W, b], set to one, adds. ``[N, entries, D * K]``."""
    block = copy.deepcopy(block)
    shape = flatten_projection(block.project).shape
    columns = []
    for k in range(shape.numel()):
        unit = torch.zeros(shape.numel(), dtype=F64)
        unit[k] = 1.0
        set_projection(block.project, unit.reshape(shape))
        with torch.no_grad():
            columns.append(block(z).flatten(1).numpy())
    return np.stack(columns, axis=-1)


def least_squares_score(g_NE, tangent_NEQ, *, rcond=1e-10):
    """Mean over samples of the squared part of g that lies in the span of the Jacobian's columns."""
    columns = tangent_NEQ.reshape(-1, tangent_NEQ.shape[-1])
    solution = np.linalg.lstsq(columns, g_NE.reshape(-1), rcond=rcond)[0]
    return float(np.square(columns @ solution).sum()) / len(g_NE)


def inserted_gradient(model, candidate, inputs, targets):
    """``.grad`` of the zero projection [W, b] once the block is really in the network."""
    grown, block = copy.deepcopy(model), copy.deepcopy(candidate.block)
    if candidate.kind == "depth":
        insert_block(grown, site=candidate.path, block=block, generator=generator())
    else:
        widen(grown, site=candidate.path, units=block, generator=generator())
    nn.functional.cross_entropy(grown(inputs), targets).backward()
    parts = [block.project.weight.grad.flatten(1)]
    if block.project.bias is not None:
        parts.append(block.project.bias.grad[:, None])
    return torch.cat(parts, dim=1).numpy()


def naive_cross_gradients(net, block, inputs, targets):
    """vec G_i of each sample: J^T g with the explicit Jacobian. ``[N, D * K]``."""
    return np.einsum("neq,ne->nq", tangents(block, stream(net, inputs)), gradient_rows(net, inputs, targets))


def naive_whitener(block, z, *, ridge):
    """(J^T J / n + ridge * mean diagonal)^(-1/2), and how much the finite pool inflates scores."""

    def inverse_of(jac_NEQ):
        moment_QQ = np.einsum("neq,ner->qr", jac_NEQ, jac_NEQ) / len(jac_NEQ)
        return np.linalg.inv(moment_QQ + ridge * np.trace(moment_QQ) / len(moment_QQ) * np.eye(len(moment_QQ)))

    jac_NEQ = tangents(block, z)
    excess = []
    for fit, other in ((jac_NEQ[::2], jac_NEQ[1::2]), (jac_NEQ[1::2], jac_NEQ[::2])):
        own_QQ, other_QQ = (np.einsum("neq,ner->qr", part, part) / len(part) for part in (fit, other))
        kept = np.trace(inverse_of(fit) @ own_QQ)
        excess.append(np.trace(inverse_of(fit) @ other_QQ) / kept - 1)
    inverse_QQ = inverse_of(jac_NEQ)
    values, basis = np.linalg.eigh((inverse_QQ + inverse_QQ.T) / 2)
    half = max(0.0, np.mean(excess))
    return (basis * np.sqrt(values)) @ basis.T, 1 + half / (2 + half)
