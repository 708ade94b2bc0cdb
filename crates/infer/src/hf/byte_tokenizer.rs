//! The tokenizer of byte-level models, as a `tokenizer.json`: token and byte are the same number.

use serde_json::{Map, Value, json};

/// A byte-level BPE without merges. No token is special: which one ends a document, the model's config says.
pub(super) fn tokenizer_json() -> Value {
    let vocab: Map<String, Value> =
        alphabet().iter().enumerate().map(|(byte, c)| (c.to_string(), json!(byte))).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [],
        },
    })
}

/// The characters that byte-level tokenizers write bytes as: themselves where they can be seen, others from U+0100 on.
fn alphabet() -> Vec<char> {
    let seen = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100;
    let character = |byte: u8| match seen(byte) {
        true => char::from(byte),
        false => {
            next += 1;
            char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    };
    (0..=u8::MAX).map(character).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_data::{Tokenizer, TokenizerSpec};

    #[test]
    fn its_tokens_are_the_bytes_of_the_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, tokenizer_json().to_string()).unwrap();
        let spec = TokenizerSpec::file(&path, Some("Ā".to_owned())).unwrap();
        let tokenizer = Tokenizer::open(&spec).unwrap();
        let text = "Line one.\n\tTwo:  é, €, 😀 \u{0}\u{7f}\u{ad}\u{100} end ";
        let tokens = tokenizer.tokens(text).unwrap();
        assert_eq!(tokens, text.bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(tokenizer.decode(&tokens), text);
        assert_eq!((tokenizer.vocabulary(), tokenizer.eos()), (256, 0));
    }
}
