//! Public shapes have the public number of parameters, counted from their graphs.

use lockstep_config::{Config, presets};

/// Parameters as the models' cards or their weights say; a tied matrix counts once.
const PUBLISHED: [(&str, u64); 39] = [
    ("gpt2", 124_439_808),
    ("gpt2-medium", 354_823_168),
    ("gpt2-large", 774_030_080),
    ("gpt2-xl", 1_557_611_200),
    ("llama-2-7b", 6_738_415_616),
    ("llama-2-13b", 13_015_864_320),
    ("llama-2-70b", 68_976_648_192),
    ("llama-3.2-1b", 1_235_814_400),
    ("llama-3.2-3b", 3_212_749_824),
    ("llama-3-8b", 8_030_261_248),
    ("llama-3-70b", 70_553_706_496),
    ("llama-3-405b", 405_853_388_800),
    ("llama-3.1-8b", 8_030_261_248),
    ("llama-3.1-70b", 70_553_706_496),
    ("llama-3.1-405b", 405_853_388_800),
    ("qwen2.5-0.5b", 494_032_768),
    ("qwen2.5-1.5b", 1_543_714_304),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen3-0.6b", 596_049_920),
    ("qwen3-4b", 4_022_468_096),
    ("qwen3-8b", 8_190_735_360),
    ("qwen3-14b", 14_768_307_200),
    ("qwen3-32b", 32_762_123_264),
    ("mistral-7b", 7_241_732_096),
    ("mixtral-8x7b", 46_702_792_704),
    ("mixtral-8x22b", 140_620_634_112),
    ("qwen3-30b-a3b", 30_532_122_624),
    ("qwen3-235b-a22b", 235_093_634_560),
    ("olmoe-1b-7b", 6_919_161_856),
    ("deepseek-moe-16b", 16_375_728_128),
    ("deepseek-v2-lite", 15_706_484_224),
    ("deepseek-v3", 671_026_419_200),
    ("gpt-oss-20b", 20_914_757_184),
    ("gpt-oss-120b", 116_829_156_672),
    ("smollm3-3b", 3_075_098_624),
    ("olmo-2-7b", 7_298_617_344),
    ("olmo-2-32b", 32_234_279_936),
    ("gemma-3-270m", 268_098_176),
    ("gemma-3-1b", 999_885_952),
];

/// Shapes of this project's own, named by their size, and one of others with another attention.
const OWN: [&str; 4] = ["llama-15m", "llama-29m", "llama-124m", "deepseek-v3-mha"];

#[test]
fn presets_have_the_published_number_of_parameters() {
    for (name, published) in PUBLISHED {
        let config = Config::parse(&format!("[model]\npreset = \"{name}\""), "run.toml", &[]).unwrap();
        let graph = lockstep_model::build(&config.model, 1, 16).unwrap();
        let counted: u64 = graph.parameters().map(|(_, value, _)| value.ty.elements() as u64).sum();
        assert_eq!(counted, published, "{name}");
    }
}

#[test]
fn every_preset_is_published_or_our_own() {
    let known = |name: &str| OWN.contains(&name) || PUBLISHED.iter().any(|(n, _)| *n == name);
    let unknown: Vec<&str> = presets().filter(|name| !known(name)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}
