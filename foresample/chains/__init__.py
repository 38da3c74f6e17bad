"""Chains: the coefficients of samplers, as data; nothing here knows a network."""

from foresample.chains.chain import Chain, Kind
from foresample.chains.edm import edm_chain, karras_sigmas
from foresample.chains.flow import flow_chain
from foresample.chains.langevin import langevin_chain
from foresample.chains.schedulers import scheduler_chain
from foresample.chains.vp import vp_chain

__all__ = [
    "Chain",
    "Kind",
    "edm_chain",
    "flow_chain",
    "karras_sigmas",
    "langevin_chain",
    "scheduler_chain",
    "vp_chain",
]
