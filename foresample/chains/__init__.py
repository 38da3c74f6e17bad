"""Chains: the coefficients of samplers, as data; nothing here knows a network."""

from foresample.chains.chain import Chain, Kind
from foresample.chains.edm import edm_chain
from foresample.chains.flow import flow_chain
from foresample.chains.langevin import langevin_chain
from foresample.chains.schedulers import scheduler_chain
from foresample.chains.sde import VE, VP, SubVP, reverse_sde_chain, sde_chain
from foresample.chains.sigmas import (
    dpm_2_ancestral_chain,
    dpmpp_2m_sde_chain,
    dpmpp_2s_ancestral_chain,
    dpmpp_3m_sde_chain,
    dpmpp_sde_chain,
    euler_ancestral_chain,
    karras_sigmas,
)
from foresample.chains.vp import vp_chain

__all__ = [
    "VE",
    "VP",
    "Chain",
    "Kind",
    "SubVP",
    "dpm_2_ancestral_chain",
    "dpmpp_2m_sde_chain",
    "dpmpp_2s_ancestral_chain",
    "dpmpp_3m_sde_chain",
    "dpmpp_sde_chain",
    "edm_chain",
    "euler_ancestral_chain",
    "flow_chain",
    "karras_sigmas",
    "langevin_chain",
    "reverse_sde_chain",
    "scheduler_chain",
    "sde_chain",
    "vp_chain",
]
