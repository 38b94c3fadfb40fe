"""Write `examples/digits/speech.parquet`: zero to nine, spoken by espeak-ng in many voices, speeds and pitches.

    apt-get install espeak-ng && python examples/digits/make_speech.py

The file is in the repository, so the demo does not need espeak-ng. This script documents how it was generated. Clips
are mono FLAC at 8 kHz with 8 bits per sample, about 2 KB each. The voices of the held-out clips are not in the training
clips.
"""

import io
import random
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import soundfile
from scipy.signal import resample_poly

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
ACCENTS = ["en-us", "en-us-nyc", "en-gb", "en-gb-x-rp", "en-gb-scotland"]
VOICES = {  # voice variants of espeak-ng: they differ in formants, breath and intonation
    "train": ["m1", "m2", "m4", "m5", "m7", "m8", "f1", "f3", "f5", "linda", "steph", "adam", "zac", "grandpa"],
    "held_out": ["m3", "m6", "f2", "f4", "edward"],
}
TAKES = {"train": 3, "held_out": 4}  # recordings of each digit per voice, with random accent, speed and pitch
SAMPLE_RATE = 8000
QUIET = 0.02  # fraction of the peak; quieter audio before and after the word is trimmed


def speak(word: str, voice: str, speed: int, pitch: int) -> npt.NDArray[np.float64]:
    """Return a spoken word as a waveform with peak 1, without silence at its ends."""
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", word]
    wave, rate = soundfile.read(io.BytesIO(subprocess.run(command, capture_output=True, check=True).stdout))
    wave = resample_poly(wave, SAMPLE_RATE // 50, rate // 50)
    wave = wave / np.abs(wave).max()
    loud = np.flatnonzero(np.abs(wave) > QUIET)
    trimmed: npt.NDArray[np.float64] = wave[loud[0] : loud[-1] + 1]
    return trimmed


def flac(wave: npt.NDArray[np.float64]) -> bytes:
    """Encode a waveform as FLAC with 8 bits per sample."""
    file = io.BytesIO()
    soundfile.write(file, 0.9 * wave, SAMPLE_RATE, format="FLAC", subtype="PCM_S8", compression_level=1.0)
    return file.getvalue()


def main() -> None:
    rng = random.Random(0)
    rows = []
    for split, variants in VOICES.items():
        for variant in variants:
            for digit, word in enumerate(WORDS):
                for _ in range(TAKES[split]):
                    voice = f"{rng.choice(ACCENTS)}+{variant}"
                    speed = rng.randint(120, 190)
                    pitch = rng.randint(25, 75)
                    audio = flac(speak(word, voice, speed, pitch))
                    rows.append(
                        {"audio": audio, "digit": digit, "voice": voice, "speed": speed, "pitch": pitch, "split": split}
                    )
    path = Path(__file__).parent / "speech.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="zstd")
    print(f"{len(rows)} clips, {path.stat().st_size:,} bytes: {path}")


if __name__ == "__main__":
    main()
