//! What the tokenizer targets do with a tokenizer that loads.

use tightfit_text::{Tokenizer, TokenizerError};

use crate::says;

/// Uses a tokenizer in every way there is.
pub fn use_all(tokenizer: &Tokenizer, text: &str) {
    for add_special in [false, true] {
        let ids = match tokenizer.encode(text, add_special) {
            Ok(ids) => ids,
            Err(error) => return says(error),
        };
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
        tokenizer.decode(&ids, !add_special).map(drop).unwrap_or_else(says);
        let mut stream = tokenizer.decode_stream(add_special);
        for &id in &ids {
            if let Err(error) = stream.push(id) {
                return says(error);
            }
        }
        stream.finish().map(drop).unwrap_or_else(says);
    }
    tokenizer
        .decode(&[0, 1, 500, u32::MAX], true)
        .map(drop)
        .unwrap_or_else(says);
}

/// The files that a tokenizer is saved as have the same tokens.
pub fn save(tokenizer: &Tokenizer, text: &str) -> Result<(), TokenizerError> {
    let files = tokenizer.hf_files()?;
    let (_, json) = files
        .iter()
        .find(|(name, _)| name == "tokenizer.json")
        .expect("always written");
    let read = Tokenizer::from_json(json, "tokenizer.json").expect("what is written can be read");
    if let Ok(ids) = tokenizer.encode(text, true) {
        assert_eq!(read.encode(text, true).expect("as the original"), ids);
    }
    Ok(())
}
