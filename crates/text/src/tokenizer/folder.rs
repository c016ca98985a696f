//! Tokenizers out of Hugging Face folders, and the files of such a folder.

use super::gguf::surround;
use super::{Parts, Source, SpecialToken, SpecialTokens, Tokenizer, TokenizerError, guarded, scan};
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::Read;
use std::path::Path;
use tokenizers::models::bpe::BPE;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl,
};

/// The largest `tokenizer.json` that is read: twice the largest known (256k tokens, 33 MB).
const TOKENIZER_LIMIT: u64 = 64 << 20;
/// The largest other file that is read. A reserved token takes 200 bytes of `tokenizer_config.json`, of which some have thousands.
const CONFIG_LIMIT: u64 = 4 << 20;

const TOKENIZER: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";
const SPECIAL: &str = "special_tokens_map.json";
const TEMPLATE: &str = "chat_template.jinja";

/// A token in a configuration: its text, or an object with its text.
#[derive(Deserialize)]
#[serde(untagged)]
enum Named {
    Text(String),
    Token { content: String },
}

impl Named {
    fn content(self) -> String {
        match self {
            Named::Text(content) | Named::Token { content } => content,
        }
    }
}

/// Chat templates: one, or several with names.
#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Several(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// What is used of `tokenizer_config.json` and `special_tokens_map.json`.
#[derive(Deserialize, Default)]
struct Config {
    bos_token: Option<Named>,
    eos_token: Option<Named>,
    pad_token: Option<Named>,
    unk_token: Option<Named>,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    #[serde(default)]
    added_tokens_decoder: BTreeMap<String, AddedToken>,
    additional_special_tokens: Option<Vec<Named>>,
    chat_template: Option<Templates>,
    /// The files that `bos_token`, `eos_token` and `pad_token` are from.
    #[serde(skip)]
    files: [&'static str; 3],
}

/// What is used of `generation_config.json` and `config.json`.
#[derive(Deserialize)]
struct Generation {
    eos_token_id: Option<Ids>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Several(Vec<u32>),
}

/// A tokenizer that can only be BPE: read as one, a vocabulary goes straight into its table. To tell kinds of models apart, the crate
/// would build a tree of it first, of thirty times the file's size.
type BpeTokenizer = TokenizerImpl<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

impl Tokenizer {
    /// The tokenizer of a Hugging Face folder: `tokenizer.json`, with what `tokenizer_config.json`, `special_tokens_map.json`,
    /// `chat_template.jinja` and `generation_config.json` add where they are there.
    ///
    /// # Errors
    /// A file that is missing, too large (64 MiB for `tokenizer.json`, 4 MiB for others) or not what it should be. The error names it.
    pub fn from_folder(folder: &Path) -> Result<Self, TokenizerError> {
        let path = folder.join(TOKENIZER);
        let json = read(&path, TOKENIZER_LIMIT)?.ok_or_else(|| TokenizerError::Read {
            path: path.clone(),
            source: std::io::ErrorKind::NotFound.into(),
        })?;
        let mut config: Config = read_json(&folder.join(CONFIG))?.unwrap_or_default();
        let map: Config = read_json(&folder.join(SPECIAL))?.unwrap_or_default();
        let file = |token: &Option<Named>| if token.is_some() { CONFIG } else { SPECIAL };
        config.files = [&config.bos_token, &config.eos_token, &config.pad_token].map(file);
        config.bos_token = config.bos_token.or(map.bos_token);
        config.eos_token = config.eos_token.or(map.eos_token);
        config.pad_token = config.pad_token.or(map.pad_token);
        config.unk_token = config.unk_token.or(map.unk_token);
        config.additional_special_tokens = config.additional_special_tokens.or(map.additional_special_tokens);
        if let Some(template) = read(&folder.join(TEMPLATE), CONFIG_LIMIT)? {
            let why = |_| TokenizerError::invalid(folder.join(TEMPLATE).display().to_string(), "not UTF-8");
            config.chat_template = Some(Templates::One(String::from_utf8(template).map_err(why)?));
        }
        let generation: Option<Generation> = read_json(&folder.join("generation_config.json"))?;
        let generation = match generation {
            Some(Generation {
                eos_token_id: Some(ids),
            }) => Some(ids),
            _ => read_json::<Generation>(&folder.join("config.json"))?.and_then(|c| c.eos_token_id),
        };
        let eos_ids = match generation {
            None => Vec::new(),
            Some(Ids::One(id)) => vec![id],
            Some(Ids::Several(ids)) => ids,
        };
        build(&json, &path.display().to_string(), config, eos_ids, Some(folder))
    }

    /// The tokenizer in the bytes of a `tokenizer.json`. `place` names it in errors.
    ///
    /// Such a file does not say which tokens begin and end a sequence; [`Tokenizer::from_folder`] knows.
    ///
    /// # Errors
    /// As [`Tokenizer::from_folder`].
    pub fn from_json(json: &[u8], place: &str) -> Result<Self, TokenizerError> {
        within(json.len() as u64, TOKENIZER_LIMIT, place)?;
        build(json, place, Config::default(), Vec::new(), None)
    }

    /// The files with which transformers' `AutoTokenizer` gives the same tokens: names and contents. Of a tokenizer from a folder
    /// these are that folder's files, byte for byte; otherwise `tokenizer.json` and `tokenizer_config.json` are written.
    ///
    /// # Errors
    /// A file that cannot be read, or is another one by now.
    pub fn hf_files(&self) -> Result<Vec<(String, Vec<u8>)>, TokenizerError> {
        match &self.source {
            Source::Folder { path, sha256 } => {
                let mut files = Vec::new();
                for (name, limit) in [
                    (TOKENIZER, TOKENIZER_LIMIT),
                    (CONFIG, CONFIG_LIMIT),
                    (SPECIAL, CONFIG_LIMIT),
                    (TEMPLATE, CONFIG_LIMIT),
                ] {
                    files.extend(read(&path.join(name), limit)?.map(|bytes| (name.to_owned(), bytes)));
                }
                match files.first() {
                    Some((name, bytes)) if name == TOKENIZER && Sha256::digest(bytes)[..] == *sha256 => Ok(files),
                    _ => Err(TokenizerError::invalid(
                        path.join(TOKENIZER).display().to_string(),
                        "changed since it was read",
                    )),
                }
            }
            Source::Memory {
                add_bos_token,
                add_eos_token,
                model_max_length,
            } => {
                let written = guarded(|| Ok(serde_json::to_vec(&self.inner)?));
                let tokenizer = written.map_err(|e| TokenizerError::invalid(TOKENIZER, e))?;
                let SpecialTokens { bos, eos, pad, unk } = &self.special;
                let mut config = json!({
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "clean_up_tokenization_spaces": false,
                    "add_bos_token": add_bos_token,
                    "add_eos_token": add_eos_token,
                });
                let content = |t: &Option<SpecialToken>| t.as_ref().map(|t| json!(t.content));
                let optional = [
                    ("bos_token", content(bos)),
                    ("eos_token", content(eos)),
                    ("pad_token", content(pad)),
                    ("unk_token", content(unk)),
                    ("model_max_length", model_max_length.map(|n| json!(n))),
                    ("chat_template", self.chat_template.as_ref().map(|t| json!(t))),
                ];
                for (key, value) in optional {
                    if let Some(value) = value {
                        config[key] = value;
                    }
                }
                // A tree of strings, numbers and booleans has JSON.
                let config = serde_json::to_vec_pretty(&config).unwrap_or_default();
                Ok(vec![(TOKENIZER.to_owned(), tokenizer), (CONFIG.to_owned(), config)])
            }
        }
    }
}

/// Builds a tokenizer as transformers does from the same files: added tokens that only the configuration lists are added, tokens with
/// a role are special, and `add_bos_token`/`add_eos_token`, where given, replace the post-processor.
fn build(
    json: &[u8],
    place: &str,
    config: Config,
    eos_ids: Vec<u32>,
    folder: Option<&Path>,
) -> Result<Tokenizer, TokenizerError> {
    let invalid = |why: String| TokenizerError::invalid(place, why);
    let mut vocab_size = scan::vocab_size(json, place)?;
    let mut inner = guarded(|| Ok(tokenizers::Tokenizer::from(BpeTokenizer::from_bytes(json)?))).map_err(invalid)?;
    // Training rows have lengths of their own.
    guarded(|| inner.with_truncation(None).map(drop)).map_err(invalid)?;
    inner.with_padding(None);

    let present = inner.get_added_tokens_decoder();
    let is_present = |content: &str| present.values().any(|t| t.content == content);
    let listed = config
        .added_tokens_decoder
        .into_values()
        .filter(|t| !is_present(&t.content))
        .collect::<Vec<_>>();
    guarded(|| inner.add_tokens(listed)).map_err(invalid)?;
    let [bos, eos, pad, unk] =
        [config.bos_token, config.eos_token, config.pad_token, config.unk_token].map(|t| t.map(Named::content));
    // transformers would add these too. But the model has no such tokens: a typing error would end no text and be trained on.
    for ((role, token), file) in [("bos_token", &bos), ("eos_token", &eos), ("pad_token", &pad)]
        .into_iter()
        .zip(config.files)
    {
        if let Some(token) = token.as_ref().filter(|token| inner.token_to_id(token).is_none()) {
            let place = folder.map_or_else(|| file.into(), |folder| folder.join(file).display().to_string());
            return Err(TokenizerError::invalid(
                place,
                format!("{role}: the vocabulary has no token `{token}`"),
            ));
        }
    }
    let more = config
        .additional_special_tokens
        .unwrap_or_default()
        .into_iter()
        .map(Named::content);
    let roles = [&bos, &eos, &pad, &unk].into_iter().flatten().cloned().chain(more);
    let special = roles
        .filter(|content| !is_present(content))
        .map(|content| AddedToken::from(content, true))
        .collect::<Vec<_>>();
    guarded(|| inner.add_tokens(special)).map_err(invalid)?;

    let token = |content: Option<String>| {
        content.and_then(|content| {
            Some(SpecialToken {
                id: inner.token_to_id(&content)?,
                content,
            })
        })
    };
    let special = SpecialTokens {
        bos: token(bos),
        eos: token(eos),
        pad: token(pad),
        unk: token(unk),
    };
    for id in inner.get_added_vocabulary().get_added_tokens_decoder().keys() {
        vocab_size = vocab_size.max(*id as usize + 1);
    }
    let (add_bos, add_eos) = (config.add_bos_token, config.add_eos_token);
    if add_bos.is_some() || add_eos.is_some() {
        let bos = special.bos.as_ref().filter(|_| add_bos == Some(true));
        let eos = special.eos.as_ref().filter(|_| add_eos == Some(true));
        inner.with_post_processor(surround(bos, eos));
    }
    let sha256: [u8; 32] = Sha256::digest(json).into();
    let source = match folder {
        Some(path) => Source::Folder {
            path: path.to_owned(),
            sha256,
        },
        None => Source::Memory {
            add_bos_token: false,
            add_eos_token: false,
            model_max_length: None,
        },
    };
    let chat_template = config.chat_template.and_then(|templates| match templates {
        Templates::One(template) => Some(template),
        Templates::Several(list) => {
            let only = list.len() == 1;
            list.into_iter()
                .find(|t| only || t.name == "default")
                .map(|t| t.template)
        }
    });
    let hash = Sha256::new().chain_update(sha256);
    Tokenizer::new(
        inner,
        place,
        Parts {
            special,
            eos_ids,
            vocab_size,
            chat_template,
            source,
            hash,
        },
    )
}

/// A file, or none if it is not there.
fn read(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, TokenizerError> {
    let failed = |source| TokenizerError::Read {
        path: path.to_owned(),
        source,
    };
    // Asked before it is opened: opening a FIFO would wait for someone to write to it.
    let metadata = match fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        metadata => metadata.map_err(failed)?,
    };
    check_regular(path, &metadata)?;
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    check_regular(path, &metadata)?;
    within(metadata.len(), limit, &path.display().to_string())?;
    let mut bytes = Vec::new();
    // The file may have grown since.
    file.take(limit).read_to_end(&mut bytes).map_err(failed)?;
    Ok(Some(bytes))
}

fn check_regular(path: &Path, metadata: &Metadata) -> Result<(), TokenizerError> {
    let Some(kind) = tightfit_format::irregular(metadata) else {
        return Ok(());
    };
    Err(TokenizerError::NotAFile {
        path: path.to_owned(),
        kind,
    })
}

fn within(bytes: u64, limit: u64, place: &str) -> Result<(), TokenizerError> {
    if bytes > limit {
        return Err(TokenizerError::TooLarge {
            place: place.to_owned(),
            bytes,
            limit,
        });
    }
    Ok(())
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>, TokenizerError> {
    let invalid = |e| TokenizerError::invalid(path.display().to_string(), e);
    read(path, CONFIG_LIMIT)?
        .map(|bytes| serde_json::from_slice(&bytes).map_err(invalid))
        .transpose()
}
