"""Images and sound: turns files into pixels and samples, in the sizes that Gemma 4's encoders take."""
