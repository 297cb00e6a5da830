"""The target classes that have EAGLE 3 in vLLM, by release.

vLLM requests auxiliary hidden states from the loaded target, and only classes with `SupportsEagle3` provide them. With any other
class the engine fails to start with "Model does not support EAGLE3 interface", after minutes of loading
(v1/worker/gpu/spec_decode/eagle/eagle3_utils.py, set_eagle3_aux_hidden_state_layers).

The table was made from the sources of vLLM 0.22 to 0.33: each class of model_executor/models/registry.py (text generation and
multimodal), followed through its base classes. Guarantees: a class outside the table is UNKNOWN, never NO. Not in it: classes
that the registry loads by platform from vllm/models (DeepSeek-V4, Kimi-K3, MiniMax-M3, ...), out-of-tree models, and models that
vLLM runs through Transformers, whose wrapper has the interface.
"""

from __future__ import annotations

from enum import Enum

from aerie.engine.releases import NEWEST_VERIFIED_VERSION, Version

_OLDEST_VERSION = Version.parse("0.22.0")

_SUPPORTED_CLASS_NAMES = """
    AfmoeForCausalLM Alpamayo2Super ApertusForCausalLM AquilaForCausalLM AquilaModel ArceeForCausalLM BeamForCausalLM
    Cohere2MoeForCausalLM CohereCompassForConditionalGeneration Cosmos3ForConditionalGeneration CwmForCausalLM
    DeepseekForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM Ernie4_5ForCausalLM Exaone4_5_ForConditionalGeneration
    Fairseq2LlamaForCausalLM Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration
    Glm5NextForCausalLM Glm5NextForConditionalGeneration GlmForCausalLM GptOssForCausalLM GraniteForCausalLM
    GraniteMoeForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM GritLM
    HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HunYuanVLForConditionalGeneration IQuestCoderForCausalLM
    InternLM3ForCausalLM InternLMForCausalLM InternS1ProForConditionalGeneration InternS2MobiusForConditionalGeneration
    InternS2PreviewForConditionalGeneration K2HorizonForCausalLM KimiK25ForConditionalGeneration LLaMAForCausalLM
    LagunaForCausalLM LightOnOCRForConditionalGeneration Llama4ForCausalLM Llama4ForConditionalGeneration LlamaForCausalLM
    LlavaForConditionalGeneration MantisForConditionalGeneration MellumForCausalLM MiMoForCausalLM MiMoV2FlashForCausalLM
    MiMoV2ForCausalLM MiMoV2OmniForCausalLM MiniCPM3ForCausalLM MiniCPMForCausalLM MiniCPMOcrForConditionalGeneration
    MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration MiniMaxM2ForCausalLM Ministral3ForCausalLM
    Mistral3ForConditionalGeneration MistralForCausalLM MistralLarge3ForCausalLM MuseGlimmerForCausalLM
    MuseGlimmerForConditionalGeneration NemotronHForCausalLM NemotronHPuzzleForCausalLM NemotronH_Nano_Omni_Reasoning_V3
    NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3 OpenCUAForConditionalGeneration
    Phi3ForCausalLM PixtralForConditionalGeneration Plamo3ForCausalLM Qwen2ForCausalLM Qwen2_5_VLForConditionalGeneration
    Qwen3ASRForConditionalGeneration Qwen3ASRRealtimeGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
    Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
    Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
    RadioMBartPrefixForCausalLM SarvamMLAForCausalLM Step1ForCausalLM TeleChat2ForCausalLM TeleChat3ForCausalLM
    TeleChatForCausalLM TeleFLMForCausalLM XverseForCausalLM
"""
_SUPPORTED_CLASSES = frozenset(_SUPPORTED_CLASS_NAMES.split())
"""Classes that have EAGLE 3 in the last release that registers them."""

_UNSUPPORTED_CLASS_NAMES = {
    "0.22.0": """
        JAISLMHeadModel
    """,
    "0.23.0": """
        BambaForCausalLM Dots1ForCausalLM InternLM2VEForCausalLM MiniMaxForCausalLM MiniMaxM1ForCausalLM
        MiniMaxText01ForCausalLM MiniMaxVL01ForConditionalGeneration QWenLMHeadModel Qwen3NextForCausalLM
        QwenVLForConditionalGeneration
    """,
    "0.24.0": """
        AyaVisionForConditionalGeneration BaiChuanForCausalLM BaichuanForCausalLM GPTBigCodeForCausalLM Grok1ForCausalLM
        Grok1ModelForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM MusicFlamingoForConditionalGeneration
        Starcoder2ForCausalLM Tarsier2ForConditionalGeneration TarsierForConditionalGeneration
    """,
    "0.25.0": """
        FuyuForCausalLM Olmo2ForCausalLM OlmoForCausalLM PersimmonForCausalLM
    """,
    "0.26.0": """
        OuroForCausalLM Plamo2ForCausalLM
    """,
    "0.28.0": """
        ArcticForCausalLM ChameleonForConditionalGeneration Cheers CheersForConditionalGeneration
        FireRedLIDForConditionalGeneration FlexOlmoForCausalLM HCXVisionForCausalLM MPTForCausalLM MptForCausalLM
        Olmo3ForCausalLM Plamo3ForCausalLM Qwen3OmniMoeForConditionalGeneration RWForCausalLM StableLMEpochForCausalLM
    """,
    "0.29.0": """
        SarvamMLAForCausalLM
    """,
    "0.30.0": """
        Cohere2MoeForCausalLM MiMoV2OmniForCausalLM NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2
        NemotronH_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3
    """,
    "0.31.0": """
        GPTNeoXForCausalLM Glm5NextForCausalLM Glm5NextForConditionalGeneration GraniteForCausalLM GraniteSWAForCausalLM
        Jais2ForCausalLM MiniCPMV4_6ForConditionalGeneration PhiForCausalLM Qwen3ASRForConditionalGeneration
        Qwen3ASRRealtimeGeneration SeedOssForCausalLM
    """,
    "0.32.0": """
        GraniteMoeForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM
    """,
    "0.33.0": """
        AXK1ForCausalLM AliceAIForCausalLM AriaForConditionalGeneration AudioFlamingo3ForConditionalGeneration
        BagelForConditionalGeneration BailingMoeForCausalLM BailingMoeV2ForCausalLM BailingMoeV2_5ForCausalLM
        BailingMoeV3ForCausalLM BailingMoeV3VLForConditionalGeneration BeeForConditionalGeneration
        Blip2ForConditionalGeneration BloomForCausalLM ChatGLMForConditionalGeneration ChatGLMModel Cohere2ForCausalLM
        Cohere2VisionForConditionalGeneration CohereAsrForConditionalGeneration CohereForCausalLM
        Cosmos3EdgeForConditionalGeneration DbrxForCausalLM DeciLMForCausalLM DeepseekOCR2ForCausalLM DeepseekOCRForCausalLM
        DeepseekVLV2ForCausalLM DiffusionGemmaForBlockDiffusion DomynEdgeForCausalLM DoryForCausalLM Dots3NoteForCausalLM
        DotsOCRForCausalLM Eagle2_5_VLForConditionalGeneration Ernie4_5_MoeForCausalLM Ernie4_5_VLMoeForConditionalGeneration
        Exaone4ForCausalLM ExaoneForCausalLM ExaoneMoEForCausalLM ExaoneMoeForCausalLM FalconForCausalLM FalconH1ForCausalLM
        FalconMambaForCausalLM FireRedASR2ForConditionalGeneration FunASRForConditionalGeneration
        FunAudioChatForConditionalGeneration GLM4VForCausalLM GPT2LMHeadModel GPTJForCausalLM Gemma2ForCausalLM
        Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma3nForConditionalGeneration GemmaForCausalLM
        Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM Glm4vForConditionalGeneration
        Glm4vMoeForConditionalGeneration GlmAsrForConditionalGeneration GlmOcrForConditionalGeneration
        Granite4VisionForConditionalGeneration GraniteMoeHybridForCausalLM GraniteSpeechForConditionalGeneration
        GraniteSpeechPlusForConditionalGeneration H2OVLChatModel HCXVisionV2ForCausalLM HYV3ForCausalLM HfMoondream
        HrmTextForCausalLM HyperCLOVAXForCausalLM IQuestLoopCoderForCausalLM Idefics3ForConditionalGeneration
        InternLM2ForCausalLM InternS1ForConditionalGeneration InternVLChatModel InternVLForConditionalGeneration
        IsaacForConditionalGeneration JambaForCausalLM KananaVForConditionalGeneration KeyeForConditionalGeneration
        KeyeVL1_5ForConditionalGeneration KimiVLForConditionalGeneration Lfm2ForCausalLM Lfm2MoeForCausalLM
        Lfm2VlForConditionalGeneration Llama_Nemotron_Nano_VL LlavaNextForConditionalGeneration
        LlavaNextVideoForConditionalGeneration LlavaOnevision2ForConditionalGeneration LlavaOnevisionForConditionalGeneration
        LongcatFlashForCausalLM LongcatFlashNgramForCausalLM Mamba2ForCausalLM MambaForCausalLM MiDashengLMModel MiniCPMO
        MiniCPMV MixtralForCausalLM Molmo2ForConditionalGeneration MolmoForCausalLM Moondream3ForCausalLM
        MoonshotKimiaForCausalLM MossAudioModel MossTranscribeDiarizeForConditionalGeneration NVLM_D NemotronForCausalLM
        NemotronParseForConditionalGeneration OPTForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM
        OpenPanguVLForConditionalGeneration OpenVLAForActionPrediction OrionForCausalLM Ovis Ovis2_5 Ovis2_6ForCausalLM
        Ovis2_6_MoeForCausalLM PaddleOCRVLForConditionalGeneration PaliGemmaForConditionalGeneration PanguEmbeddedForCausalLM
        PanguProMoEV2ForCausalLM PanguUltraMoEForCausalLM Param2MoEForCausalLM Phi3VForCausalLM Phi4ForCausalLMV
        Phi4MMForCausalLM PhiMoEForCausalLM QianfanOCRForConditionalGeneration Qwen2AudioForConditionalGeneration
        Qwen2MoeForCausalLM Qwen2VLForConditionalGeneration Qwen2_5OmniForConditionalGeneration Qwen2_5OmniModel
        RForConditionalGeneration Rnj1ForCausalLM SarvamMoEForCausalLM SkyworkR1VChatModel SmolVLMForConditionalGeneration
        SolarForCausalLM StableLmForCausalLM Step3TextForCausalLM Step3VLForConditionalGeneration Step3p5ForCausalLM
        Step3p7ForConditionalGeneration Step5ForCausalLM Step5ForConditionalGeneration StepVLForConditionalGeneration
        UltravoxModel UnlimitedOCRForCausalLM VoxtralForConditionalGeneration VoxtralRealtimeGeneration
        WhisperForConditionalGeneration Zamba2ForCausalLM
    """,
}
"""Classes by the last release that registers them without EAGLE 3."""

_LAST_UNSUPPORTED_VERSION = {
    name: Version.parse(release) for release, names in _UNSUPPORTED_CLASS_NAMES.items() for name in names.split()
}


class Eagle3Support(Enum):
    """Whether a class has EAGLE 3 in a release, as far as known."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


def lookup_eagle3_support(architecture: str | None, version: Version) -> Eagle3Support:
    """Return whether the class provides auxiliary hidden states in this release."""
    if architecture is None or version < _OLDEST_VERSION or version.release[:2] > NEWEST_VERIFIED_VERSION.release[:2]:
        return Eagle3Support.UNKNOWN
    last_without = _LAST_UNSUPPORTED_VERSION.get(architecture)
    if last_without is not None and version.release[:2] <= last_without.release[:2]:
        return Eagle3Support.NO
    return Eagle3Support.YES if architecture in _SUPPORTED_CLASSES else Eagle3Support.UNKNOWN


def first_supported_version(architecture: str) -> Version | None:
    """Return the first release in which a class that once lacked EAGLE 3 has it, or None if none is known."""
    last_without = _LAST_UNSUPPORTED_VERSION.get(architecture)
    if last_without is None or architecture not in _SUPPORTED_CLASSES:
        return None
    return Version.parse(f"0.{last_without.release[1] + 1}.0")
