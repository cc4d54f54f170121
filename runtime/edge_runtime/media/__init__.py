"""Images and sound: files to pixels and samples, in the sizes that Gemma 4's encoders take."""
