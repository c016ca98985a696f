//! The cards that go by a name: `cards.json`, from their makers' data sheets.

use std::sync::LazyLock;

use serde::Deserialize;

/// A card.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// As the command takes it, such as `rtx-a5000`.
    pub name: String,
    /// All of its memory as the driver shows it, in MiB.
    pub memory_mib: u64,
    /// Of that memory, in 1e9 bytes per second.
    pub bandwidth_gb: f64,
    /// Of `f32` without its matrix units, in 1e12 operations per second.
    pub f32_tflops: f64,
    /// Of its matrix units on dense 16-bit numbers with `f32` sums, in 1e12 operations per second.
    pub half_tflops: f64,
    /// Whether those take `bf16`.
    pub bf16: bool,
    /// The way to the host.
    pub pcie: Pcie,
    /// Whether it is one that people usually connect a display to.
    pub display: bool,
    /// Where the figures are from.
    pub source: String,
}

/// A PCI Express link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pcie {
    /// Its generation: 3 to 5.
    pub generation: u32,
    /// Its lanes.
    pub lanes: u32,
}

impl Pcie {
    /// Bytes per second one way, encoding counted and protocol not: 8 GT/s of 128b/130b in generation 3, twice as many in each after it
    /// (PCI Express Base Specification 5.0, section 4.2.2).
    pub fn bytes_per_second(self) -> f64 {
        let transfers = 8e9 * 2_f64.powi(self.generation as i32 - 3);
        transfers * 128.0 / 130.0 / 8.0 * f64::from(self.lanes)
    }
}

static TABLE: LazyLock<Vec<Card>> =
    LazyLock::new(|| serde_json::from_str(include_str!("cards.json")).unwrap_or_default());

impl Card {
    /// Every card of the table.
    pub fn all() -> &'static [Self] {
        &TABLE
    }

    /// The card of that name, in any case and with or without its maker's, its line's and separators: `RTX A5000` is `a5000`.
    pub fn named(name: &str) -> Option<&'static Self> {
        let wanted = plain(name);
        Self::all().iter().find(|card| plain(&card.name) == wanted)
    }

    /// All of its memory, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_mib << 20
    }
}

/// A name's letters and digits after what many cards share.
fn plain(name: &str) -> String {
    let name = name.to_ascii_lowercase();
    let words = name.split(|c: char| !c.is_ascii_alphanumeric());
    let own =
        words.filter(|word| !["nvidia", "geforce", "amd", "radeon", "tesla", "rtx", "rx", "instinct"].contains(word));
    let name: String = own.collect();
    name.strip_prefix("rtx").map(str::to_owned).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_card_has_figures_and_a_source() {
        assert_eq!(Card::all().len(), 36);
        for card in Card::all() {
            let figures = [card.bandwidth_gb, card.f32_tflops, card.half_tflops];
            assert!(
                figures.iter().all(|figure| *figure > 0.0) && card.memory_mib > 0,
                "{card:?}"
            );
            assert!(!card.source.is_empty(), "{card:?}");
        }
    }

    #[test]
    fn names_find_one_card_each() {
        for card in Card::all() {
            assert_eq!(Card::named(&card.name), Some(card));
        }
        for name in ["a5000", "RTX A5000", "NVIDIA RTX A5000", "rtx_a5000", "rtxa5000"] {
            assert_eq!(Card::named(name).map(|card| &*card.name), Some("rtx-a5000"), "{name}");
        }
        assert_eq!(
            Card::named("rtx4090").map(|card| card.memory_bytes()),
            Some(24_564 << 20)
        );
        assert_eq!(
            Card::named("GeForce RTX 3090 Ti").map(|card| &*card.name),
            Some("rtx-3090-ti")
        );
        assert_eq!(Card::named("voodoo-2"), None);
    }

    #[test]
    fn a_link_of_the_fourth_generation_moves_31_and_a_half_gigabytes_a_second() {
        let link = Pcie {
            generation: 4,
            lanes: 16,
        };
        assert!((link.bytes_per_second() / 1e9 - 31.5).abs() < 0.02);
    }
}
